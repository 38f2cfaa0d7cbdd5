"""The growing network: useful alone, with any training loop."""

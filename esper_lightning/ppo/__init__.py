"""Proximal policy optimisation for recurrent, masked, factored policies."""

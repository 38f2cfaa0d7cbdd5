"""Files that are replaced atomically or hold tensors only, and strict checks of the states read from them."""

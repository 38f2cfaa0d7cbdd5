"""Files that hold tensors only, and strict checks of the states read from them."""

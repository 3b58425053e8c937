"""Scripts that run from the checkout; tests call the functions in them."""

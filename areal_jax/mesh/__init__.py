"""Device slices, and the rules that lay arrays out on them."""

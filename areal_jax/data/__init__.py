"""Where problems come from and in which order they are drawn."""

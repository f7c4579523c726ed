"""One Transformer whose families are rows of settings."""

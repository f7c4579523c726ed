"""Running other people's code: errors are named, hung work is killed."""

"""Where each machine of a run lives: threads here, other processes later."""

"""Generation: engines that never stop decoding, and what keeps them fed."""

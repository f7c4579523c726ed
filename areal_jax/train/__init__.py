"""Training: packing, the jitted step, the trainer that owns the policy."""

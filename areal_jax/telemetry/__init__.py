"""What a run says about itself: events, metrics, samples, plots, progress."""

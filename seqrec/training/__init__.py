"""Training: objectives, losses, the loop, checkpoints, and what starts from a trained model."""

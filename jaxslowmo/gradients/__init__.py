"""What happens to gradients before the optimizer: averaged, summed as rows, scaled, clipped."""

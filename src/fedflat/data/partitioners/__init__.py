"""Ways to divide a training set among clients, one module per family."""

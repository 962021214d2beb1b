"""What the estimators share: parameters, stores, intermediate data, and the start of training."""

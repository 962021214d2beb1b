"""The connections between ranks: made, authenticated, measured and handed to the core."""

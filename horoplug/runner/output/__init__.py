"""What a terminal shows, written without blocking the launcher."""

"""What ``horovodrun --check-build`` prints."""

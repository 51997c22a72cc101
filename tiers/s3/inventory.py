"""What lies in a bucket."""

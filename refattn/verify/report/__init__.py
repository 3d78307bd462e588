"""What was found, as text and as a page."""

"""What is known of other projects: sharp edges and bugs."""

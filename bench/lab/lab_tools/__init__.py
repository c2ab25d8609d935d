"""What several scripts of the laboratory share."""

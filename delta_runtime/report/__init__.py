"""What happened, for people: statistics of a step and their rendering."""

"""What a growth step is made of, from the statistics of a batch to wider weights."""

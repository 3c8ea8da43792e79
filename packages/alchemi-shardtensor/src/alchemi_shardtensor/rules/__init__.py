"""Rules: what each kind of operation does with the rows of one rank, and how a tag is propagated through the others."""

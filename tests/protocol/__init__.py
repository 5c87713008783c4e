"""The slot, watermark and ack protocol as a small model, and a check of every interleaving of it."""

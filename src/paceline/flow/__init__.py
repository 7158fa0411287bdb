"""What moves between processes: the bounded channel and the launcher of workers."""

"""A queue of batches between processes. Providers write files of batches into a folder, and trainers read them."""

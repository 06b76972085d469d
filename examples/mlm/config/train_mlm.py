"""A masked language model in the manner of BERT: what the provider and train.py both read."""

dataset = "mlm"

# The batches
batch_size = 64
block_size = 18  # three sentences of six words
mask_probability = 0.15
val_batches = 10

# The model and its training
learning_rate = 2e-3
max_iters = 600
eval_interval = 100
out_dir = "out"

"""Masked diffusion over characters: what prepare.py and train.py both read."""

dataset = "char_diffusion"

# The batches
batch_size = 16
block_size = 64
batches_per_file = 50
val_batches = 10  # made once; every evaluation reads the same ones
val_fraction = 0.1  # of the text, at its end
mask_probability = 0.15
ignore_index = -100  # the target of a position that was not chosen
seed = 1337

# The model and its training
n_layer = 2
n_head = 4
n_embd = 128
learning_rate = 4e-3
warmup_iters = 50
max_iters = 800
eval_interval = 100  # a checkpoint, too
num_threads = 1  # the other core makes batches
out_dir = "out"

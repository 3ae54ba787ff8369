"""Small arguments of each example that stands alone, and the parts that its steps have."""

SETUP, FORWARD, BACKWARD, OPTIMIZER = "setup", "forward", "backward", "optimizer"
TRAINING = {SETUP, FORWARD, BACKWARD, OPTIMIZER}

SMALL: dict[str, tuple[str, set[str]]] = {
    "bert_large_finetune": ("--steps 1 --batch-size 2 --max-length 64 --layers 2", TRAINING),
    "diffusion_unet": (
        "--steps 1 --batch-size 2 --image-size 32 --channels 32 --multipliers 1 2 --samples 1 --sample-steps 1",
        TRAINING,
    ),
    "gan_train": ("--steps 1 --batch-size 16", TRAINING),
    "gpt2_train": ("--steps 1 --batch-size 1 --seq-len 128 --gradient-checkpointing", TRAINING),
    "llama_train": ("--steps 1 --batch-size 1 --seq-len 128 --size tiny", TRAINING),
    "llm_generate": ("--size tiny --prompt-len 16 --new-tokens 4", {SETUP, FORWARD}),
    # It updates its weights by hand, as the PyTorch example that it follows.
    "lstm_lm": ("--epochs 1 --steps 2 --words 5000 --vocab-size 500", {SETUP, FORWARD, BACKWARD}),
    "resnet_train": ("--steps 1 --batch-size 8 --workers 1 --image-size 64", TRAINING),
    "unet3d_segmentation": ("--steps 1 --patch 32 --val-side 32 --channels 8 16 32", TRAINING),
    "vit_inference": ("--batches 1 --layers 2", {SETUP, FORWARD}),
    "vit_train": ("--steps 1 --batch-size 8 --layers 2", TRAINING),
}

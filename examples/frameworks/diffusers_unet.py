"""Fine-tune a latent diffusion U-Net with diffusers, draw images with a scheduler, and decode them with a VAE.

Usage:

    python diffusers_unet.py                                # Stable Diffusion 1 sized, latents 64 x 64, batch 4
    python diffusers_unet.py --gradient-checkpointing --batch-size 8
    python diffusers_unet.py --image-size 1024 --vae-tiling --vae-slicing
"""

import argparse

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, DPMSolverMultistepScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel, compute_snr

SIZES = {
    # What the U-Net and the VAE of Stable Diffusion 1.5 are made of.
    "sd1": {
        "channels": (320, 640, 1280, 1280),
        "layers": 2,
        "text": 768,
        "heads": 8,
        "vae": (128, 256, 512, 512),
    },
    "tiny": {"channels": (32, 64), "layers": 1, "text": 32, "heads": 4, "vae": (32, 64)},
}
PROMPT_TOKENS = 77


def parse_args():
    parser = argparse.ArgumentParser(description="Train and sample a latent diffusion model.")
    parser.add_argument("--size", choices=sorted(SIZES), default="sd1")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--ema", action="store_true", help="keep a moving average of the weights")
    parser.add_argument("--samples", type=int, default=2, help="images to draw; 0: none")
    parser.add_argument("--sample-steps", type=int, default=2)
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--vae-slicing", action="store_true", help="decode one image at a time")
    parser.add_argument("--vae-tiling", action="store_true", help="decode images tile by tile")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def latent_side(size, image_size):
    return image_size >> (len(size["vae"]) - 1)


def make_unet(size, image_size):
    attended = len(size["channels"]) - 1
    return UNet2DConditionModel(
        sample_size=latent_side(size, image_size),
        block_out_channels=size["channels"],
        layers_per_block=size["layers"],
        down_block_types=("CrossAttnDownBlock2D",) * attended + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * attended,
        cross_attention_dim=size["text"],
        attention_head_dim=size["heads"],
    )


def make_vae(size, image_size):
    levels = len(size["vae"])
    return AutoencoderKL(
        block_out_channels=size["vae"],
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=size["layers"],
        latent_channels=4,
        sample_size=image_size // 2,  # larger images are decoded in tiles of this side, if tiling is on
    )


def encode(vae, images):
    with torch.no_grad():
        return vae.encode(images).latent_dist.sample() * vae.config.scaling_factor


def loss_of(unet, scheduler, latents, text, generator):
    """Min-SNR weighted error of the predicted noise."""
    noise = torch.randn_like(latents)
    times = torch.randint(scheduler.config.num_train_timesteps, (latents.shape[0],), generator=generator)
    times = times.to(latents.device)
    noisy = scheduler.add_noise(latents, noise, times)
    predicted = unet(noisy, times, encoder_hidden_states=text).sample
    snr = compute_snr(scheduler, times)
    weights = torch.stack([snr, torch.full_like(snr, 5.0)], dim=1).min(dim=1).values / snr
    errors = F.mse_loss(predicted.float(), noise.float(), reduction="none").mean(dim=(1, 2, 3))
    return (errors * weights).mean()


@torch.no_grad()
def sample(unet, vae, text, args, dtype):
    """Classifier-free guidance with a fast solver, then the decoder."""
    scheduler = DPMSolverMultistepScheduler(beta_schedule="scaled_linear")
    scheduler.set_timesteps(args.sample_steps, device="cuda")
    both = torch.cat([torch.zeros_like(text), text])
    side = latent_side(SIZES[args.size], args.image_size)
    latents = (
        torch.randn(args.samples, 4, side, side, device="cuda", dtype=dtype) * scheduler.init_noise_sigma
    )
    for time in scheduler.timesteps:
        doubled = scheduler.scale_model_input(torch.cat([latents, latents]), time)
        empty, guided = unet(doubled, time, encoder_hidden_states=both).sample.chunk(2)
        latents = scheduler.step(empty + args.guidance * (guided - empty), time, latents).prev_sample
    unet.to("cpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    images = vae.decode(latents / vae.config.scaling_factor).sample
    images = (images / 2 + 0.5).clamp(0, 1).mul(255).byte().permute(0, 2, 3, 1).cpu().numpy()
    print(f"{images.shape} decoded, peak memory {torch.cuda.max_memory_allocated() / 2**20:.2f} MiB")


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    size = SIZES[args.size]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.precision]

    vae = make_vae(size, args.image_size).to("cuda", dtype).requires_grad_(False).eval()
    unet = make_unet(size, args.image_size).to("cuda").train()
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if args.vae_slicing:
        vae.enable_slicing()
    if args.vae_tiling:
        vae.enable_tiling()
    average = EMAModel(unet.parameters(), decay=0.9999) if args.ema else None
    print(f"{sum(p.numel() for p in unet.parameters()) / 1e6:.1f} M parameters in the U-Net")

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5, weight_decay=1e-2)
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        images = torch.rand(args.batch_size, 3, args.image_size, args.image_size).to("cuda", dtype) * 2 - 1
        text = torch.randn(args.batch_size, PROMPT_TOKENS, size["text"]).to("cuda", dtype)
        latents = encode(vae, images)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = loss_of(unet, scheduler, latents, text, generator)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if average is not None:
            average.step(unet.parameters())
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    if args.samples:
        if average is not None:
            average.copy_to(unet.parameters())
        del optimizer, average
        unet.to(dtype).eval()
        text = torch.randn(args.samples, PROMPT_TOKENS, size["text"], device="cuda", dtype=dtype)
        sample(unet, vae, text, args, dtype)


if __name__ == "__main__":
    main()

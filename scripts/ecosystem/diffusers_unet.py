"""A small U-Net of diffusers learns to take noise away."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=32,
    block_out_channels=(32, 64, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    layers_per_block=1,
    norm_num_groups=8,
)
noise_schedule = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
generator = torch.Generator().manual_seed(0)

for _ in range(8):
    clean = torch.randn(8, 3, 32, 32, generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    times = torch.randint(0, 1000, (8,), generator=generator)
    noisy = noise_schedule.add_noise(clean, noise, times)
    loss = torch.nn.functional.mse_loss(model(noisy, times, return_dict=False)[0], noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

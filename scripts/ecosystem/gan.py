"""A convolutional GAN: two nets, two optimizers, two losses and backward passes a step."""

import torch
from torch import nn

torch.manual_seed(0)
up = [nn.ConvTranspose2d(48, 48, 4, 1, 0), nn.BatchNorm2d(48), nn.ReLU(inplace=True)]
for _ in range(3):
    up += [nn.ConvTranspose2d(48, 48, 4, 2, 1), nn.BatchNorm2d(48), nn.ReLU(inplace=True)]
generator_net = nn.Sequential(*up, nn.Conv2d(48, 3, 3, padding=1), nn.Tanh())
down = [nn.Conv2d(3, 48, 3, padding=1), nn.LeakyReLU(0.2, inplace=True)]
for _ in range(3):
    down += [nn.Conv2d(48, 48, 4, 2, 1), nn.BatchNorm2d(48), nn.LeakyReLU(0.2, inplace=True)]
judge_net = nn.Sequential(*down, nn.Conv2d(48, 1, 4), nn.Flatten(0))
generator_optimizer = torch.optim.Adam(generator_net.parameters(), lr=2e-4, betas=(0.5, 0.999))
judge_optimizer = torch.optim.Adam(judge_net.parameters(), lr=2e-4, betas=(0.5, 0.999))
binary = nn.functional.binary_cross_entropy_with_logits
noise = torch.Generator().manual_seed(0)

for _ in range(8):
    real = torch.randn(16, 3, 32, 32, generator=noise)
    fake = generator_net(torch.randn(16, 48, 1, 1, generator=noise))
    judged_real, judged_fake = judge_net(real), judge_net(fake.detach())
    judge_loss = binary(judged_real, torch.ones(16)) + binary(judged_fake, torch.zeros(16))
    judge_optimizer.zero_grad()
    judge_loss.backward()
    judge_optimizer.step()

    generator_loss = binary(judge_net(fake), torch.ones(16))
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()
    print("loss", judge_loss.item().hex(), generator_loss.item().hex(), flush=True)
parameters = [*generator_net.parameters(), *judge_net.parameters()]
print("weights", sum(p.detach().double().sum() for p in parameters).item().hex())

"""The second half of the demo: a policy cloned from episodes of different lengths."""

from __future__ import annotations

import time
from typing import Any

import click
import gymnasium
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn

from tdio import StoreDataset, TensorDictStore
from tdio.cli._loading import shuffled

_EPISODES = 120
_EPOCHS = 6


def run(connection: dict[str, Any], workers: int) -> float:
    """Collect, upload, clone, and return the mean return over 10 episodes, 0 to 500."""
    episodes = [_expert_episode(seed) for seed in range(_EPISODES)]
    lengths = [len(episode["action"]) for episode in episodes]
    click.echo(f"  collected {_EPISODES} episodes of {min(lengths)} to {max(lengths)} steps")
    began = time.monotonic()
    store = TensorDictStore.from_tensordict(lazy_stack(episodes), **connection)
    rate = sum(lengths) / (time.monotonic() - began)
    click.echo(f"  uploaded them as a ragged store, {store.td_id}: {rate:,.0f} rows/s")
    dataset = StoreDataset(td_id=store.td_id, **connection)
    loader = shuffled(dataset, 8, workers)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    steps, seconds = _clone(policy, loader)
    click.echo(
        f"  cloned a policy from shuffled batches of whole episodes: {steps:,} steps, "
        f"{steps / seconds:,.0f} rows/s"
    )
    return sum(_play(policy, seed) for seed in range(1000, 1010)) / 10


def _expert(observation: Any) -> int:
    """Push towards the side to which the pole leans and turns, with a pull to the centre."""
    position, velocity, angle, turn = observation
    return int(angle + 0.5 * turn + 0.05 * position + 0.1 * velocity > 0)


def _expert_episode(seed: int) -> TensorDict:
    """Play with random slips of growing size, so that lengths and states differ.

    The label is what the expert wanted, not the slip.
    """
    environment = gymnasium.make("CartPole-v1")
    draw = torch.Generator().manual_seed(seed)
    slips = 0.6 * seed / _EPISODES
    observation, _ = environment.reset(seed=seed)
    observations, labels, ended = [], [], False
    while not ended:
        wanted = _expert(observation)
        observations.append(torch.from_numpy(observation))
        labels.append(wanted)
        slip = bool(torch.rand((), generator=draw) < slips)
        observation, _, fallen, over, _ = environment.step(1 - wanted if slip else wanted)
        ended = fallen or over
    return TensorDict(observation=torch.stack(observations), action=torch.tensor(labels))


def _clone(policy: nn.Module, loader: Any) -> tuple[int, float]:
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    steps, began = 0, time.monotonic()
    for _ in range(_EPOCHS):
        for batch in loader:
            observation = torch.cat([episode["observation"] for episode in batch.unbind(0)])
            action = torch.cat([episode["action"] for episode in batch.unbind(0)])
            loss = nn.functional.cross_entropy(policy(observation), action)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            steps += len(action)
    return steps, time.monotonic() - began


def _play(policy: nn.Module, seed: int) -> float:
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        with torch.no_grad():
            action = int(policy(torch.from_numpy(observation)).argmax())
        observation, reward, fallen, over, _ = environment.step(action)
        total += float(reward)
        ended = fallen or over
    return total

"""Routers in NumPy, one token or one group at a time, in float64: what the array programs are compared with."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxpar.config.moe import MoeConfig

Pick = tuple[list[int], list[float]]  # experts and gates of one token


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def largest(x: np.ndarray, k: int) -> list[int]:
    return sorted(range(len(x)), key=lambda i: (-x[i], i))[:k]


def in_best_groups(scores: np.ndarray, config: MoeConfig) -> np.ndarray:
    """Scores with -inf for experts of other groups."""
    size = len(scores) // config.num_groups
    groups = [scores[i * size : (i + 1) * size] for i in range(config.num_groups)]
    value = [max(group) if config.group_score == "max" else sum(sorted(group)[-2:]) for group in groups]
    best = largest(np.array(value), config.top_groups)
    return np.array([score if i // size in best else -np.inf for i, score in enumerate(scores)])


def topk(logits: np.ndarray, config: MoeConfig) -> Pick:
    p = softmax(logits)
    chosen = largest(in_best_groups(p if config.softmax == "before" else logits, config), config.top_k)
    if config.softmax == "after":
        gates = softmax(logits[chosen])
    elif config.renormalize:
        gates = p[chosen] / p[chosen].sum()
    else:
        gates = p[chosen]
    return chosen, list(gates * config.routed_scaling)


def switch(logits: np.ndarray) -> Pick:
    p = softmax(logits)
    return [int(p.argmax())], [p.max()]


def gshard(logits: np.ndarray, uniform: float | None) -> Pick:
    p = softmax(logits)
    first, second = largest(p, 2)
    g1, g2 = p[[first, second]] / (p[first] + p[second])
    if uniform is not None and not 2 * g2 > uniform:
        return [first, -1], [g1, 0.0]
    return [first, second], [g1, g2]


def sigmoid_bias(logits: np.ndarray, bias: np.ndarray, config: MoeConfig) -> Pick:
    score = sigmoid(logits)
    chosen = largest(in_best_groups(score + bias, config), config.top_k)
    gates = score[chosen] / (score[chosen].sum() + 1e-20) if config.renormalize else score[chosen]
    return chosen, list(gates * config.routed_scaling)


def expert_choice(logits: np.ndarray, valid: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, E] experts and gates of one group."""
    p = np.array([softmax(row) for row in logits])
    expert = np.full(p.shape, -1)
    for e in range(p.shape[1]):
        tokens = [t for t in range(len(p)) if valid[t]]
        for t in sorted(tokens, key=lambda t: (-p[t, e], t))[:capacity]:
            expert[t, e] = e
    return expert, np.where(expert >= 0, p, 0)


def best_balanced_total(scores: np.ndarray, room: int) -> float:
    """The largest total score of an assignment of the rows with at most `room` rows an expert."""
    places = np.repeat(scores, room, axis=1)
    rows, columns = linear_sum_assignment(places, maximize=True)
    return float(places[rows, columns].sum())


def sinkhorn_choice(logits: np.ndarray, valid: np.ndarray, tolerance: float, k: int) -> np.ndarray:
    """Experts [T, k] of one group, as Megatron-LM iterates: plain exponentials, error on d1."""
    cost = np.exp(logits[valid])
    d0, d1, error = np.ones(len(cost)), np.ones(cost.shape[1]), np.inf
    while error > tolerance:
        d0 = 1 / len(cost) / (cost @ d1)
        new = 1 / len(d1) / (d0 @ cost)
        error, d1 = np.abs(new - d1).mean(), new
    expert = np.full((len(logits), k), -1)
    expert[valid] = [largest(row, k) for row in d0[:, None] * cost * d1]
    return expert


def places(expert: np.ndarray, gate: np.ndarray, num_experts: int, capacity: int, policy: str) -> np.ndarray:
    """Places [T, k] of one group: choices one at a time, in the order of the policy."""
    order = [(t, j) for t in range(expert.shape[0]) for j in range(expert.shape[1])]
    if policy == "choice":
        order.sort(key=lambda choice: choice[1])
    if policy == "probability":
        order.sort(key=lambda choice: -gate[choice])
    taken, place = [0] * num_experts, np.full(expert.shape, -1)
    for choice in order:
        e = expert[choice]
        if e >= 0 and taken[e] < capacity:
            place[choice] = taken[e]
            taken[e] += 1
    return place

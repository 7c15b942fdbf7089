"""A transformer block on a 2 x 2 mesh: tensor parallel on one axis, the sequence on the other.

    torchrun --nproc-per-node=4 examples/mesh_block.py

The sequence is sharded along "cp": attention exchanges keys and values there. Heads and columns of
the weights are sharded along "tp": products gather their rows and scatter their sums there. Each
axis is a group with its own fused kernels. The result and all gradients are compared with those of
one process, in fp32. Without a GPU the ranks are processes on a CPU, with gloo.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

import tileweave as tw
from tileweave import ops

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
TOLERANCE = 4e-2 if GPU else 1e-5
"""Largest relative error of a tensor, by norms."""
ROWS, HEADS, DIM = (1024, 4, 64) if GPU else (32, 4, 8)
WIDTH, HIDDEN = HEADS * DIM, 4 * HEADS * DIM
SHAPES = {
    "qkv": (WIDTH, 3, HEADS, DIM),
    "out": (HEADS, DIM, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
SHARDED_AXIS = {"qkv": 2, "out": 0, "up": 1, "down": 0}
"""Axis of each weight that is sharded along "tp"."""
Weights = dict[str, torch.Tensor]


def block(x: torch.Tensor, weights: Weights, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of the block's result.

    Args:
        x: the rank's rows, (ROWS / 4, WIDTH).
        weights: the rank's shards.
    """
    tp, cp = mesh["tp"], mesh["cp"]
    qkv = ops.all_gather_matmul(norm(x), weights["qkv"].flatten(1), group=tp)
    q, k, v = qkv.view(1, len(qkv), 3, -1, DIM).unbind(2)
    attended = ops.sp_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), causal=True, group=cp
    )
    x = x + ops.matmul_reduce_scatter(
        attended.flatten(2)[0], weights["out"].flatten(0, 1), group=tp
    )
    hidden = gelu(ops.all_gather_matmul(norm(x), weights["up"], group=tp))
    return x + ops.matmul_reduce_scatter(hidden, weights["down"], group=tp)


def block_of_one_process(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return the block's result for all rows and whole weights."""
    q, k, v = (norm(x) @ weights["qkv"].flatten(1)).view(ROWS, 3, HEADS, DIM).permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    x = x + attended.flatten(1) @ weights["out"].flatten(0, 1)
    return x + gelu(norm(x) @ weights["up"]) @ weights["down"]


def norm(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, (WIDTH,))


def random_tensors() -> tuple[torch.Tensor, torch.Tensor, Weights]:
    """Return the input, the gradient of the result and the weights, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(DTYPE).to(DEVICE)

    weights = {name: random(*shape, scale=WIDTH**-0.5) for name, shape in SHAPES.items()}
    return random(ROWS, WIDTH), random(ROWS, WIDTH), weights


def errors(mesh: DeviceMesh) -> dict[str, float]:
    """Return the relative error of the result and of each gradient on this rank."""
    whole_x, whole_grad, whole_weights = random_tensors()
    cp, tp = mesh.get_coordinate()

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(4)[2 * cp + tp]

    def shard(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(2, SHARDED_AXIS[name])[tp]

    x = rows(whole_x).clone().requires_grad_()
    weights = {
        name: shard(name, weight).clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, weight in whole_weights.items()
    }
    y = block(x, weights, mesh)
    y.backward(rows(whole_grad))
    # Each rank has added the rows of its part of the sequence only.
    gradients = {name: ops.all_reduce(w.grad, group=mesh["cp"]) for name, w in weights.items()}

    exact_x = whole_x.float().requires_grad_()
    exact = {name: weight.float().requires_grad_() for name, weight in whole_weights.items()}
    exact_y = block_of_one_process(exact_x, exact)
    exact_y.backward(whole_grad.float())
    pairs = {"result": (y, rows(exact_y)), "x": (x.grad, rows(exact_x.grad))}
    pairs |= {name: (gradients[name], shard(name, w.grad)) for name, w in exact.items()}
    return {
        name: float((actual.float() - right).norm() / right.norm())
        for name, (actual, right) in pairs.items()
    }


def main() -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) != 4:
        print("mesh_block: expected torchrun --nproc-per-node=4")
        return 1
    if GPU:
        tw.init()
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("cp", "tp"))
    worst = errors(mesh)
    wrong = {name: error for name, error in worst.items() if not error <= TOLERANCE}
    text = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    print(f"rank {dist.get_rank()}: {'WRONG' if wrong else 'right'}: relative errors {text}")
    if GPU:
        tw.finalize()
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

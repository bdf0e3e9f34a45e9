"""The mesh puts tp next to each other and pp apart; layers cut over tp are the whole layers."""

from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor

from picospore.launch import run_ranks
from picospore.parallel import Axis, Mesh, ParallelDims


def test_rank_order_is_tp_then_dp_then_pp():
    dims = ParallelDims(dp=2, tp=2, pp=2)
    assert dims.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_expert_groups_lie_inside_data_groups():
    dims = ParallelDims(dp=4, tp=2, ep=2)
    assert dims.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert dims.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("axis", ["world", "dp", "tp", "pp", "ep", "edp"])
def test_every_rank_is_in_one_group_of_each_axis(axis):
    dims = ParallelDims(dp=4, tp=3, pp=2, ep=2)
    assert sorted(rank for group in dims.groups(axis) for rank in group) == list(range(24))


def test_one_process_is_a_mesh_whose_collectives_are_the_identity():
    mesh = Mesh(ParallelDims())
    x = Tensor([1.0, 2.0], ms.float32)
    assert (mesh.tp.size, mesh.tp.index, mesh.dp.size) == (1, 0, 1)
    assert mesh.tp.sum_op()(x) is x
    mesh.barrier()


def test_a_groups_name_tells_axis_and_ranks():
    assert Axis("tp", (4, 5, 6), 1).group == "tp-4-5-6"


@pytest.mark.slow
def test_layers_cut_over_four_real_ranks_equal_the_whole_layers_forward_and_backward(tmp_path):
    assert run_ranks([str(Path(__file__).parent / "parallel_ranks.py")], 4, tmp_path) == 0

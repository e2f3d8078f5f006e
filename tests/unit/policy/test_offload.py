"""What leaves the device between updates: which tensors, where they lie meanwhile, and what frees them."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megagrpo.policy.offload import HostArena, Offload, move_to, optimizer_tensors

CPU = torch.device("cpu")


def actor_of(parameter_dtype=torch.bfloat16):
    """Two weights, one of them its own main parameter as in a float32 run, after a step of torch's AdamW."""
    module = torch.nn.Linear(3, 5, bias=False)
    narrow = torch.nn.Linear(5, 2, bias=False).to(parameter_dtype)
    main = torch.nn.Parameter(narrow.weight.detach().float().clone())
    view = torch.nn.Parameter(module.weight.detach().view(-1))
    for parameter in (main, view):
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([main, view])
    optimizer.step()
    gradients = torch.ones(25)
    chunk = SimpleNamespace(
        parameters=lambda: [*module.parameters(), *narrow.parameters()],
        offload_grad_buffers=lambda **_: gradients.untyped_storage().resize_(0),
        restore_grad_buffers=lambda **_: gradients.untyped_storage().resize_(100),
    )
    chained = SimpleNamespace(optimizer=optimizer)
    return SimpleNamespace(
        chunks=[chunk], optimizer=SimpleNamespace(chained_optimizers=[chained]), gradients=gradients
    ), (main, view)


def test_main_parameters_and_moments_leave_and_weights_stay():
    actor, (main, view) = actor_of()
    found = optimizer_tensors(actor)
    assert {id(tensor) for tensor in found} == {
        id(main),
        *(
            id(actor.optimizer.chained_optimizers[0].optimizer.state[parameter][moment])
            for parameter in (main, view)
            for moment in ("exp_avg", "exp_avg_sq")
        ),
    }


def test_parts_come_back_bit_for_bit_as_the_same_objects_and_their_memory_was_free_meanwhile():
    actor, _ = actor_of()
    tensors = optimizer_tensors(actor)
    before = [tensor.detach().clone() for tensor in tensors]
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    offload = Offload(["gradients", "optimizer"], actor, None, CPU)
    offload.leave()
    offload.leave()  # away is away
    assert actor.gradients.untyped_storage().nbytes() == 0
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == 1, "one arena"
    assert offload.host_bytes >= sum(tensor.nbytes for tensor in tensors)
    assert not any(ref() is not None and ref().data_ptr() not in storages for ref in memory)
    with offload.resident():
        assert [id(tensor) for tensor in optimizer_tensors(actor)] == [id(tensor) for tensor in tensors]
        for tensor, expected in zip(tensors, before, strict=True):
            assert torch.equal(tensor, expected)
            assert tensor.untyped_storage().data_ptr() not in storages
        assert actor.gradients.untyped_storage().nbytes() == 100
        tensors[0].data.add_(1)
    assert torch.equal(tensors[0], before[0] + 1)


def test_a_state_that_a_checkpoint_put_in_the_place_of_one_that_is_away_is_what_comes_back():
    actor, (main, _) = actor_of()
    offload = Offload(["optimizer"], actor, None, CPU)
    offload.leave()
    state = actor.optimizer.chained_optimizers[0].optimizer.state[main]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 7)
    main.data.fill_(3)
    with offload.resident():
        assert (state["exp_avg"] == 7).all() and (main == 3).all()


def test_an_update_that_fails_leaves_the_device_too():
    actor, _ = actor_of()
    offload = Offload(["gradients"], actor, None, CPU)
    offload.leave()
    with pytest.raises(ValueError, match="a spike"), offload.resident():
        raise ValueError("a spike")
    assert actor.gradients.untyped_storage().nbytes() == 0


def test_an_arena_keeps_its_memory_and_holds_every_dtype():
    arena = HostArena()
    tensors = [
        torch.arange(7, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64),
        torch.ones(3, 0),
        torch.arange(6.0).view(2, 3).T,
    ]
    expected = [tensor.clone() for tensor in tensors]
    arena.take_in(tensors)
    size = arena.num_bytes
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    move_to(tensors, CPU)
    arena.take_in(tensors[:2])
    assert arena.num_bytes == size
    assert torch.equal(tensors[0], expected[0])

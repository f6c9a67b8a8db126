"""Received memory belongs to the tensors that view it: it is used again once the last of them is gone, never before."""

import threading

import torch

from distflow.comm.allocator import CachingAllocator


def test_memory_of_a_living_tensor_is_never_allocated_again() -> None:
    allocator = CachingAllocator()
    memory = allocator.empty(1000)
    view = memory[100:200].view(torch.int32)
    view.fill_(7)
    del memory
    other = allocator.empty(1000)
    other.fill_(0)
    assert (view == 7).all()
    assert other.data_ptr() != view.untyped_storage().data_ptr()


def test_memory_of_a_living_numpy_array_is_never_allocated_again() -> None:
    allocator = CachingAllocator()
    array = allocator.empty(1000).numpy()[10:20]
    array[:] = 7
    allocator.empty(1000).fill_(0)
    assert (array == 7).all()


def test_freed_memory_is_used_again() -> None:
    allocator = CachingAllocator()
    memory = allocator.empty(1000)
    pointer, view = memory.data_ptr(), memory[:8]
    del memory
    assert allocator.empty(500).data_ptr() != pointer
    del view
    assert allocator.empty(1000).data_ptr() == pointer
    assert allocator.empty(400).data_ptr() != pointer  # the smallest block that is large enough


def test_freed_memory_is_used_again_for_a_little_more() -> None:
    allocator = CachingAllocator()
    pointer = allocator.empty(1000).data_ptr()
    assert allocator.empty(1200).data_ptr() == pointer


def test_memory_that_another_thread_frees_is_used_again() -> None:
    allocator = CachingAllocator()
    columns = [allocator.empty(1000)]
    pointer = columns[0].data_ptr()
    thread = threading.Thread(target=columns.clear)
    thread.start()
    thread.join()
    assert allocator.empty(1000).data_ptr() == pointer


def test_memory_does_not_grow_with_the_number_of_allocations() -> None:
    allocator = CachingAllocator()
    for size in (1000, 5000, 2000, 9000, 100) * 20:
        allocator.empty(size)
    assert len(allocator._free) == 1


def test_the_memory_outlives_the_allocator() -> None:
    memory = CachingAllocator().empty(1000)
    memory.fill_(7)
    assert (memory == 7).all()

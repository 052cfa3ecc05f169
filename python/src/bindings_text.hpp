#pragma once
// Docstrings that several classes share.

namespace cf::python {

inline constexpr const char* kClose =
    "Gives the slots of a model on a GPU back; every other call is refused then. Does nothing on the CPU.";
inline constexpr const char* kSharedInit =
    "Takes `slots` of a model on a GPU until it ends. Raises ValueError where fewer are free.";
inline constexpr const char* kRunnerInit =
    "Takes memory for a cache of `slots` sequences of `capacity` entries and for activations of dtype `activation`; "
    "`chunk` tokens of a prompt go through the model at once. With a `window` each slot is a stream without end: a "
    "token "
    "sees so many tokens, its own among them, and the first `sinks`; `capacity` has no effect then. Raises ValueError "
    "for sizes below 1 or another dtype, "
    "and MemoryError where the memory is not free.";

}  // namespace cf::python

// All headers for a kernel with TileWeave builtins. They do not depend on TileLang's headers, which
// the kernel includes after them.
#pragma once
#include "atomics.cuh"
#include "barriers.cuh"
#include "bits.cuh"
#include "bulk.cuh"
#include "context.cuh"
#include "delay.cuh"
#include "ll.cuh"
#include "memory.cuh"
#include "multimem.cuh"
#include "put_get.cuh"
#include "qualifiers.cuh"
#include "ragged.cuh"
#include "ranks.cuh"
#include "record.cuh"
#include "signals.cuh"
#include "system_atomics.cuh"

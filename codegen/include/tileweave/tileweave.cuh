// Everything a kernel with TileWeave builtins includes. Stands alone: it comes before TileLang's
// headers.
#pragma once
#include "atomics.cuh"
#include "barriers.cuh"
#include "bits.cuh"
#include "bulk.cuh"
#include "context.cuh"
#include "delay.cuh"
#include "memory.cuh"
#include "multimem.cuh"
#include "put_get.cuh"
#include "signals.cuh"
#include "system_atomics.cuh"
#include "qualifiers.cuh"

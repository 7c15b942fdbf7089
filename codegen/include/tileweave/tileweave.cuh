// Everything a kernel with TileWeave builtins includes. Stands alone: it comes before TileLang's
// headers.
#pragma once
#include "barriers.cuh"
#include "bulk.cuh"
#include "context.cuh"
#include "put_get.cuh"
#include "signals.cuh"
#include "words.cuh"

// Everything a kernel with TileWeave builtins includes. Stands alone: it comes before TileLang's
// headers.
#pragma once
#include "barriers.cuh"
#include "context.cuh"
#include "signals.cuh"
#include "words.cuh"

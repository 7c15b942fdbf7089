# RUN: %python %s | %filecheck %s
"""Vectors of a tile that tensor cores read are stored in registers, then in the swizzled tile."""

import tileweave as tw
from tests.passes.product_of_words import WORDS, product_of_words

print(tw.emit(product_of_words(squares=True), world_size=2, pass_configs=WORDS))
# No other operator chooses the layout of `sent`.
# CHECK: half_t vector[4];
# CHECK: tw::ll_st<tw::Scope::sys>({{.*}}tw::bits(*(uint2*)(((half_t*)sent) +
# CHECK: uint2 value = {{.*}}tw::ll_ld<tw::Scope::sys, 2>
# CHECK-NEXT: *(uint2*)(vector + 0) = value;
# CHECK-NEXT: *(uint2*)(((half_t*)received) + ({{.*}}) = *(uint2*)(vector + 0);
# CHECK-NOT: tw::ll_

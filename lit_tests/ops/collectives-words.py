# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Small collectives by words with flags: 16 bytes an access, no signal, no wait, no fence."""

import torch

import tileweave as tw
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core.registry import OPERATORS


def show(op, shape, dtype, options=(), stage="cuda"):
    x = torch.empty(shape, dtype=dtype, device="meta")
    program = OPERATORS[op].steps(checked_problem(op, x, None, 4, options), "ll")
    print("TEST:", program.attrs["global_symbol"], stage)
    print(tw.emit(program, world_size=4, stage=stage))


# CHECK-LABEL: TEST: all_reduce_one_shot_ll cuda
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: tw::ll_st<tw::Scope::sys>((&(arrived[{{.*}}])), tw::bits(*(uint2*)(x + {{.*}})), epoch);
# CHECK-NOT: __syncthreads
# CHECK: for (int [[RANK:i[_0-9]*]] = 0; [[RANK]] < 4; ++[[RANK]]) {
# CHECK-NEXT: tw::ll_ld<tw::Scope::sys, 2>((&(arrived[
# CHECK-NOT: {{__syncthreads|tw::}}
# CHECK: *(uint2*)(out
show("all_reduce", (32768,), torch.bfloat16)

# CHECK-LABEL: TEST: all_reduce_one_shot_ll ptx
# CHECK: .entry all_reduce_one_shot_ll_kernel(
# CHECK: st.relaxed.sys.global.v2.b64
# CHECK-NOT: {{fence|membar|bar.sync|\.acq_rel}}
# CHECK: ld.relaxed.sys.global.v2.b64
# CHECK-NOT: {{fence|membar|bar.sync|\.acq_rel}}
# CHECK: ret;
show("all_reduce", (32768,), torch.bfloat16, stage="ptx")

# The owner of a tile adds it, and stores the sum to all.
# CHECK-LABEL: TEST: all_reduce_ll cuda
# CHECK: tw::ll_st<tw::Scope::sys>((&(partials[{{.*}}])), tw::bits(*(uint2*)(x + {{.*}})), epoch);
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(partials[
# CHECK: tw::ll_st<tw::Scope::sys>((&(sums[{{.*}}])), tw::bits(*(uint2*)({{.*}}sum_shared{{.*}})), epoch);
# CHECK-NOT: __syncthreads
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(sums[
# CHECK-NOT: tw::
show("all_reduce", (1 << 19,), torch.bfloat16)

# CHECK-LABEL: TEST: all_gather_ll cuda
# CHECK: tw::ll_st<tw::Scope::sys>((&(arrived[{{.*}}])), tw::bits(*(int2*)(x + {{.*}})), epoch);
# CHECK-NOT: __syncthreads
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(arrived[
# CHECK-NEXT: *(int2*)(out + {{.*}}) = value;
# CHECK-NOT: {{__syncthreads|tw::}}
show("all_gather", (64, 256), torch.bfloat16)

# Between axes, too: columns begin at multiples of two words.
# CHECK-LABEL: TEST: all_to_all_ll cuda
# CHECK: tw::ll_st<tw::Scope::sys>((&(arrived[{{.*}}])), tw::bits(*(int2*)(x + {{.*}})), epoch);
# CHECK-NOT: __syncthreads
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(arrived[
# CHECK-NEXT: *(int2*)(out + {{.*}}) = value;
# CHECK-NOT: {{__syncthreads|tw::}}
show("all_to_all", (4, 64, 64), torch.bfloat16, (1, 0))

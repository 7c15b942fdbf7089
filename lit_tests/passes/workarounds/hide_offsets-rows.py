# RUN: %python %s | %filecheck %s
"""Elements of a constant row of a tile that tensor cores read are at the places of its layout."""

import tileweave as tw
from tests.simulator.device.miscompiled import row_of_a_tile

# In row 3 the last two bits of the numbers of vectors are inverted.
# CHECK: row[0] = ((half_t*)A_tile)[{{.*}} >> 4) + 1) & 1) * 16)){{.*}} >> 3) + 1) & 1) * 8)) + (0 | 0)) + {{.*}} + 192)];
print(tw.emit(row_of_a_tile(), world_size=1))

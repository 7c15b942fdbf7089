"""Ragged symmetric tensors."""

from .checks import *
from .segments import *

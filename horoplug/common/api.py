"""The functions and classes that every framework's module exports: ``from horoplug.common.api import *``."""

from horoplug.base.errors import HorovodInternalError as HorovodInternalError
from horoplug.base.errors import HorovodVersionMismatchError as HorovodVersionMismatchError
from horoplug.base.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from horoplug.base.errors import NotInitializedError as NotInitializedError
from horoplug.base.surface import declare as _declare
from horoplug.common.basics import ccl_built as ccl_built
from horoplug.common.basics import cross_rank as cross_rank
from horoplug.common.basics import cross_size as cross_size
from horoplug.common.basics import cuda_built as cuda_built
from horoplug.common.basics import ddl_built as ddl_built
from horoplug.common.basics import gloo_built as gloo_built
from horoplug.common.basics import gloo_enabled as gloo_enabled
from horoplug.common.basics import init as init
from horoplug.common.basics import is_homogeneous as is_homogeneous
from horoplug.common.basics import is_initialized as is_initialized
from horoplug.common.basics import local_rank as local_rank
from horoplug.common.basics import local_size as local_size
from horoplug.common.basics import mpi_built as mpi_built
from horoplug.common.basics import mpi_enabled as mpi_enabled
from horoplug.common.basics import mpi_threads_supported as mpi_threads_supported
from horoplug.common.basics import nccl_built as nccl_built
from horoplug.common.basics import rank as rank
from horoplug.common.basics import rocm_built as rocm_built
from horoplug.common.basics import shutdown as shutdown
from horoplug.common.basics import size as size
from horoplug.common.basics import start_timeline as start_timeline
from horoplug.common.basics import stop_timeline as stop_timeline
from horoplug.common.process_sets import ProcessSet as ProcessSet
from horoplug.common.process_sets import add_process_set as add_process_set
from horoplug.common.process_sets import global_process_set as global_process_set
from horoplug.common.process_sets import remove_process_set as remove_process_set
from horoplug.common.reduce_ops import Adasum as Adasum
from horoplug.common.reduce_ops import Average as Average
from horoplug.common.reduce_ops import Max as Max
from horoplug.common.reduce_ops import Min as Min
from horoplug.common.reduce_ops import Product as Product
from horoplug.common.reduce_ops import Sum as Sum

_declare(globals())

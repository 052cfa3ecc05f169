# What GPU tests take, read by CTest itself behind the tests of a program: cf_gpu_tests, or of a program of ranks
# cf_rank_tests; cf_gpu_alone and cf_rank_alone measure a device's free memory. scripts/test_gpu says with CF_TEST_GPUS
# how many GPUs there are, each of 8 slots. Without it, as without a resource spec file, CTest gives no GPUs out: a test
# that measures runs alone then, and one of ranks sees all.
if(cf_gpu_tests)
  set_tests_properties(${cf_gpu_tests} PROPERTIES RESOURCE_GROUPS gpus:1)
endif()
if(DEFINED ENV{CF_TEST_GPUS})
  # Ranks are 4 at most. Of more than half a GPU's slots CTest cannot take two from one GPU. What waits for several GPUs
  # at once or for a whole one comes first: it would get them only when all else has ended.
  set(cf_ranks $ENV{CF_TEST_GPUS})
  if(cf_ranks GREATER 4)
    set(cf_ranks 4)
  endif()
  if(cf_gpu_alone)
    set_tests_properties(${cf_gpu_alone} PROPERTIES RESOURCE_GROUPS gpus:8 COST 500000)
  endif()
  if(cf_rank_tests)
    set_tests_properties(${cf_rank_tests} PROPERTIES RESOURCE_GROUPS ${cf_ranks},gpus:5 COST 1000000)
  endif()
  if(cf_rank_alone)
    set_tests_properties(${cf_rank_alone} PROPERTIES RESOURCE_GROUPS ${cf_ranks},gpus:8 COST 2000000)
  endif()
else()
  foreach(cf_test IN LISTS cf_gpu_alone cf_rank_alone)
    set_tests_properties(${cf_test} PROPERTIES RUN_SERIAL ON)
  endforeach()
endif()
unset(cf_gpu_tests)
unset(cf_gpu_alone)
unset(cf_rank_tests)
unset(cf_rank_alone)

"""Commands that judge the judge, or hold our kernels against recorded facts."""

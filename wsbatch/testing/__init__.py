"""Equipment for tests of programs that embed wsbatch: in-memory streams, scripted engines, a virtual-time worker."""

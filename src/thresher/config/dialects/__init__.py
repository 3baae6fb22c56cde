"""Configs of other trainers: tables of their keys, and their translation to ours."""

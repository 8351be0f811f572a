import bitwright

plan = bitwright.optimize("my-model", budget=bitwright.Budget(max_kl=0.02))

print("met" if plan.met else "missed", plan.summary.effective_bits, "bits per weight")
print("KL", plan.measured.kl.mean, "in", (plan.measured.kl.low, plan.measured.kl.high))
for site in plan.sites:
    print(site.name, site.scheme, site.rounding, site.reason)
bitwright.write_plan(plan, "my-plan")
bitwright.write_report(plan, "my-plan/report.html")
